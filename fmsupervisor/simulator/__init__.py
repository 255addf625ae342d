"""A simulated HGX host and a simulated nv-fabricmanager. Production code never imports this package."""
