"""Where the recurrent state of a request lives: geometry, layout, cursors and slots."""
