"""One page of the results of sweeps, and pictures of them: `commlib bench report`."""
