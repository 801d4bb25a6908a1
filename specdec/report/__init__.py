"""How results are shown: tables, intervals as text, and the statistics behind them."""
