"""What is learned and how: objectives, teachers, the optimizer, and what a step costs."""
