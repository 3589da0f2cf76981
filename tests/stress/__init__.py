"""Programs that press on Preble for as long as one likes, and tests that run them small."""
