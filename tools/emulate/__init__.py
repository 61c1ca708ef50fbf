"""Runs programs of this machine on an emulated CPU: AVX-512 and AMX where there are none, or a CPU without AVX."""
