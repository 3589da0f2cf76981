"""The async router, alone and among others."""
