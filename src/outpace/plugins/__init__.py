"""Ways to use Outpace from other libraries."""
