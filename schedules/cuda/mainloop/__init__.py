"""Mainloop: the loop over the steps of the sum, in which copies run ahead of the products, and its pipelines and barriers."""
