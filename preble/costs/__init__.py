"""Cost models beside their arithmetic (`preble._cost`): presets, fitting to samples, files."""
