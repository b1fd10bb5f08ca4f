//! Any bytes as a ticket, and any JSON as `kv_transfer_params`: refused, or what is written and read again as the same.

#![no_main]

use kvx_connector::ticket::{Ticket, TransferParams};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match Ticket::from_bytes(bytes) {
        Ok(read) => {
            let Ok(written) = read.to_bytes() else { return };
            assert_eq!(Ticket::from_bytes(&written).expect("what is written is read"), read);
        }
        Err(error) => assert!(!error.message().is_empty(), "{error}"),
    }
    if let Ok(value) = serde_json::from_slice(bytes)
        && let Err(error) = TransferParams::from_json(&value)
    {
        assert!(!error.message().is_empty(), "{error}");
    }
});
