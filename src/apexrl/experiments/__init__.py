"""Many runs: seeds, sweeps, plots and reports."""
