"""Every compiled function of the package, and nothing else: floats and arrays in, floats and arrays out."""
