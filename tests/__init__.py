"""The tests of Preble; folders are those of `preble/`, faces are beside this file."""
