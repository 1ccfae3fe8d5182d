"""The layers of settings, read and checked before anything else happens."""
