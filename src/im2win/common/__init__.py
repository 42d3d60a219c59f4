"""What every room may use: files, messages, tables in Markdown, TVM's hooks, worker processes."""
