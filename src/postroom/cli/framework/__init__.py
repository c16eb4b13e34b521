"""What all commands share: options, output, questions, exits."""
