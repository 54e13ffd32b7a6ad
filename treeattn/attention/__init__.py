"""What a step attends to: shapes and arrays, checked before anything is sent."""
