"""A small Mixture-of-Experts model that ships with the repository, and how it was trained."""
