//! Packets that are dropped, in a network namespace of this process's own.

use std::process::Command;

/// Set in the environment of a process that was started in a namespace of its own.
pub(crate) const INSIDE: &str = "KVX_CHAOS_NAMESPACE";

/// The faulty producer's host: see `World::new`.
const HOST: &str = "127.0.0.2";

/// What drops packets to and from the faulty producer's control channel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Filter {
    /// A packet filter, both ways.
    Nft,
    /// Another one, both ways.
    Iptables,
    /// A route into nothing, one way.
    Route,
}

impl Filter {
    /// The best that there is.
    pub(crate) fn new() -> Self {
        [Self::Nft, Self::Iptables]
            .into_iter()
            .find(|filter| {
                let works = filter.commands(true).iter().all(|it| run(it));
                filter.commands(false).iter().for_each(|it| _ = run(it));
                works
            })
            .unwrap_or(Self::Route)
    }

    pub(crate) fn begin(self) {
        assert!(self.commands(true).iter().all(|it| run(it)), "{self:?}");
    }

    pub(crate) fn end(self) {
        assert!(self.commands(false).iter().all(|it| run(it)), "{self:?}");
    }

    fn commands(self, begin: bool) -> Vec<String> {
        match (self, begin) {
            (Self::Nft, true) => vec![
                "nft add table ip kvx".into(),
                "nft add chain ip kvx input { type filter hook input priority 0 ; }".into(),
                format!("nft add rule ip kvx input ip saddr {HOST} drop"),
                format!("nft add rule ip kvx input ip daddr {HOST} drop"),
            ],
            (Self::Nft, false) => vec!["nft delete table ip kvx".into()],
            (Self::Iptables, _) => {
                let verb = if begin { "-A" } else { "-D" };
                let rule = |which| format!("iptables {verb} INPUT {which} {HOST} -j DROP");
                vec![rule("-s"), rule("-d")]
            }
            (Self::Route, _) => {
                let verb = if begin { "add" } else { "del" };
                vec![format!("ip route {verb} blackhole {HOST}/32 table local")]
            }
        }
    }
}

/// Whether a command could be run, and did what it should.
fn run(command: &str) -> bool {
    let mut words = command.split(' ');
    let program = words.next().unwrap();
    Command::new(program).args(words).output().is_ok_and(|output| output.status.success())
}

/// Why this process cannot have a network namespace of its own; `None` where it can.
pub(crate) fn missing() -> Option<String> {
    let output = Command::new("unshare").args(["-Urn", "ip", "link", "set", "lo", "up"]).output();
    match output {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Some(format!("unshare: {error}")),
    }
}

/// Runs one test of this program in a namespace. Returns whether it passed, and what it said.
pub(crate) fn inside(test: &str) -> (bool, String) {
    let program = std::env::current_exe().unwrap();
    let output = Command::new("unshare")
        .args(["-Urn", "sh", "-c", "ip link set lo up && exec \"$0\" --exact \"$1\" --nocapture"])
        .arg(program)
        .arg(test)
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}
