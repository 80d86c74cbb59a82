"""What other libraries' training loops need besides an optimizer; each module imports the library it is named for."""
