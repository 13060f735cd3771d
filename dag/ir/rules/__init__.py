"""What an operator's arguments must be, where its kernels trust their caller. `rules` asks, the
other files hold the rules."""
