"""The one declaration of every setting, and the files they are read from."""
