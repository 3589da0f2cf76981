"""What Preble is measured with: `python -m benchmarks.FOLDER.NAME --help`, from the root of the checkout."""
