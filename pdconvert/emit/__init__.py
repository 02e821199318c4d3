"""Writers of the build folder's parts."""
