"""What tests and demonstrations do to a control plane: faults, and the switches behind them."""
