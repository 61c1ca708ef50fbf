"""Which tier and format was executed how: natively, emulated, under sanitizers."""
