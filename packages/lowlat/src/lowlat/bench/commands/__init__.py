"""One module for each group of `lowlat bench` commands: options in, a result or a verdict out."""
