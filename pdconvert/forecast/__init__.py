"""What a build will take and give, computed from geometry and published figures, before any weight is read."""
