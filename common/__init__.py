"""What every room may use: errors, text, files, remote files, the sign of life."""
