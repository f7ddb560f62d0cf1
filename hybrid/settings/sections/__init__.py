"""The tables of the TOML file, a class for each, with the condition beside each setting."""
