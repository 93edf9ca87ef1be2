"""What runs in processes of their own, because it may crash: each public function here is one child's whole life."""
