"""Timing a build on this machine, and refusing what this machine cannot do."""
