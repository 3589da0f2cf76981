"""The compiled core: trees, token ids, comparing, readers' slots."""
