//! Any bytes as a scheduler's step: refused, or what is written and read again as the same.

#![no_main]

use kvx_connector::scheduler::StepMetadata;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| match StepMetadata::decode(bytes) {
    Ok(read) => {
        let Ok(written) = read.encode() else { return };
        assert_eq!(StepMetadata::decode(&written).expect("what is written is read"), read);
    }
    Err(error) => assert!(!error.message().is_empty(), "{error}"),
});
