"""What compute kernels lose to the SMs that communication holds, and the share of each cause of their slowdown."""
