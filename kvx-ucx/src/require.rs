//! What is said where another transport would carry the data than those that are required.

use kvx_core::Error;

use crate::config::{Names, Options};
use crate::error::BACKEND;
use crate::lanes::{Lanes, Taken};

/// Why UCX chose another is known only where it was left none of them: of `found`, as in `tcp/eth0`.
pub(crate) fn unwanted(required: &Names, options: &Options, found: &[String], (chosen, taken): (&Lanes, Taken)) -> Error {
    let error = Error::config("connect", "a transport that was not asked for would carry the data")
        .with_backend(BACKEND)
        .with_context("require", required)
        .with_context("chosen", chosen);
    let is_required = |resource: &String| resource.split('/').next().is_some_and(|name| required.admit(name));
    if taken == Taken::Plain && required.admit("cma") && found.iter().any(|resource| resource.starts_with("cma/")) {
        return error.with_remedy(
            "allow another with require: before UCX 1.20, and with PROTO_ENABLE=n, CMA carries nothing that is read or written by itself",
        );
    }
    if found.iter().any(is_required) {
        return error.with_remedy("allow it with require, or see why UCX does not choose the other: UCX_LOG_LEVEL=info");
    }
    let limit = |(name, value): (&str, &Option<Names>)| Some(format!("{name}={}", value.as_ref()?));
    let limits: Vec<_> = [("tls", &options.tls), ("devices", &options.devices)].into_iter().filter_map(limit).collect();
    let error = error.with_context("found", found.join(" "));
    error.with_remedy(match limits.as_slice() {
        [] => "UCX finds none that require names: kvx backends lists what it finds".to_owned(),
        [one] => format!("UCX finds none that require names with {one}: kvx backends lists what it finds without"),
        all => format!("UCX finds none that require names with {}: kvx backends lists what it finds without", all.join(" and ")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_keeps_a_required_transport_out_is_named() {
        let chosen = Lanes::of(&["0:tcp/eth0.0 md[1] -> md[1]/tcp/sysdev[255] am rma_bw#0".to_owned()], Taken::All);
        let said = |options: &str, found: &[&str]| {
            let options = Options::read(&options.parse().unwrap()).unwrap();
            let found: Vec<_> = found.iter().map(|name| (*name).to_owned()).collect();
            unwanted(options.require.as_ref().unwrap(), &options, &found, (&chosen, Taken::All)).to_string()
        };
        let text = said("require=rc_*,devices=eth0", &["self/memory", "tcp/eth0"]);
        assert!(text.contains("with devices=eth0:") && text.contains("found=self/memory tcp/eth0"), "{text}");
        assert!(text.contains("require=rc_*") && text.contains("chosen=tcp (eth0)"), "{text}");
        let text = said("require=rc_*+dc_*,devices=eth0+eth1,tls=rc+tcp", &["tcp/eth0"]);
        assert!(text.contains("with tls=rc+tcp and devices=eth0+eth1:"), "{text}");
        let text = said("require=rc_*", &["tcp/eth0"]);
        assert!(text.contains("UCX finds none that require names:"), "{text}");
        // It is there, and UCX chose another: why is not known.
        let text = said("require=rc_*,devices=eth0+mlx5_0:1", &["rc_mlx5/mlx5_0:1", "tcp/eth0"]);
        assert!(text.contains("UCX_LOG_LEVEL") && !text.contains("found="), "{text}");
    }
}
