"""The checks that only a machine with GPUs can make, in one command and one file to send back."""
