"""One module per thing Fabric Manager has: binary, configuration, process, log."""
