"""Ray and other hosts."""
