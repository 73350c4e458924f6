"""Every remedy is run: what an error advises is applied to the case that printed it, and helps."""
