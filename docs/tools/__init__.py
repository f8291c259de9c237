"""What writes pages of the documentation from the library itself."""
