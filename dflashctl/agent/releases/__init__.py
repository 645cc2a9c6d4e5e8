"""Deploys: releases on disk, their proofs, the switch, and the locks on the host and inside."""
