"""Building blocks of the operations' `cpu.py`: vector arithmetic, calls into compiled code, pages, running softmax."""
