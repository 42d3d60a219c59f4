"""From committed results to what people read: tables and plots."""
