//! Any bytes as what two ranks that want to meet say: refused, or what is written and read again as the same.

#![no_main]

use kvx_connector::protocol::peers::Message;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| match Message::decode(bytes) {
    Ok(read) => {
        let Ok(written) = read.encode() else { return };
        assert_eq!(Message::decode(&written).expect("what is written is read"), read);
    }
    Err(error) => assert!(!error.message().is_empty(), "{error}"),
});
