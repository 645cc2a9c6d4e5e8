"""The only code that talks to another machine. Nothing above it knows which engine a host has."""
