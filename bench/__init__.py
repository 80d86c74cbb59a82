"""Programs that train with offload-core and measure it; not part of the installed packages."""
