"""The bench of offloading on a rank."""
