"""What every engine instance shares, whatever its role: settings, the engine's events on the loop, lease, drain."""
