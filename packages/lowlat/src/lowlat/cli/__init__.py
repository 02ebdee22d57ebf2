"""The command line. Modules here import only light things at the top: `lowlat --help` answers at once."""
