"""What a rule can put into a model, the registry of its names, and the devices it names."""
