//! Any text as a control address: refused, or an address in its one form.

#![no_main]

use kvx_core::card::Address;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(address) = text.parse::<Address>() {
        let form = address.to_string();
        assert_eq!(form.parse::<Address>().expect("its own form"), address);
    }
});
