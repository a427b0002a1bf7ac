"""pdserve: disaggregated prefill/decode serving. One room per folder; see README.md."""
