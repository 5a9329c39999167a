"""`commlib bench report`: one HTML page with the results of sweeps, and pictures of them."""
