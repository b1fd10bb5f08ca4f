//! Names to addresses, off the channel's thread: the system's resolver blocks, for as long as it likes.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvx_core::card::{Address, Host};
use kvx_core::{Error, ErrorKind, Result, Retry};

/// Most addresses of one name that are tried.
const MAX_ADDRESSES: usize = 16;
/// Most threads that look names up.
const MAX_THREADS: usize = 4;

type LookUp = dyn Fn(&str, u16) -> io::Result<Vec<SocketAddr>> + Send + Sync;

/// How names are looked up.
#[derive(Clone)]
pub(super) struct Resolver(Arc<LookUp>);

impl Default for Resolver {
    fn default() -> Self {
        Self(Arc::new(|name, port| Ok((name, port).to_socket_addrs()?.collect())))
    }
}

impl fmt::Debug for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Resolver")
    }
}

impl Resolver {
    #[cfg(test)]
    pub(super) fn new(
        look_up: impl Fn(&str, u16) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(look_up))
    }

    /// The addresses of a host, in the order in which to try them. Blocks where it is a name.
    pub(super) fn resolve(&self, address: &Address) -> Result<Vec<SocketAddr>> {
        match (without_look_up(address), address.host()) {
            (Some(found), _) => Ok(found),
            (None, Host::Name(name)) => {
                let mut found = (self.0)(name, address.port()).map_err(|source| {
                    unresolved(address).with_source(source).with_retry(Retry::Backoff)
                })?;
                // A host that is in the list twice is not tried twice.
                let mut seen = Vec::new();
                found.retain(|one| !seen.contains(one) && (seen.push(*one), true).1);
                found.truncate(MAX_ADDRESSES);
                match found.is_empty() {
                    true => Err(unresolved(address).with_retry(Retry::Backoff)),
                    false => Ok(found),
                }
            }
            (None, _) => Err(unresolved(address)),
        }
    }
}

fn unresolved(address: &Address) -> Error {
    Error::new(ErrorKind::Config, "control", format!("{} has no address", address.host()))
        .with_remedy("check the name, and the resolver of this host")
}

/// Where nobody needs to be asked. `localhost` is this host, whatever a server says (RFC 6761).
pub(super) fn without_look_up(address: &Address) -> Option<Vec<SocketAddr>> {
    let port = address.port();
    let ips: Vec<IpAddr> = match address.host() {
        Host::V4(ip) => vec![(*ip).into()],
        Host::V6(ip) => vec![(*ip).into()],
        Host::Name(_) if address.is_loopback() => {
            vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]
        }
        _ => return None,
    };
    Some(ips.into_iter().map(|ip| SocketAddr::new(ip, port)).collect())
}

/// Looks names up in a few threads, so that a slow one does not hold up the others. The threads end when there is nothing more
/// to look up; one that waits for the system's resolver cannot be stopped, and then outlives whoever asked.
#[derive(Debug)]
pub(super) struct Resolving<T> {
    resolver: Resolver,
    state: Arc<Mutex<State<T>>>,
}

#[derive(Debug)]
struct State<T> {
    asked: VecDeque<(T, Address)>,
    found: Vec<(T, Result<Vec<SocketAddr>>)>,
    threads: usize,
}

impl<T: Send + 'static> Resolving<T> {
    pub(super) fn new(resolver: Resolver) -> Self {
        let state = State { asked: VecDeque::new(), found: Vec::new(), threads: 0 };
        Self { resolver, state: Arc::new(Mutex::new(state)) }
    }

    /// `told` is called, from another thread, once [`found`](Self::found) has an answer.
    pub(super) fn ask(
        &self,
        who: T,
        address: Address,
        told: impl Fn() + Send + 'static,
    ) -> io::Result<()> {
        {
            let mut state = lock(&self.state);
            state.asked.push_back((who, address));
            if state.threads == MAX_THREADS {
                return Ok(());
            }
            state.threads += 1;
        }
        let (state, resolver) = (Arc::clone(&self.state), self.resolver.clone());
        let thread = std::thread::Builder::new().name("kvx-resolve".into()).spawn(move || {
            while let Some((who, address)) = next(&state) {
                let found = resolver.resolve(&address);
                lock(&state).found.push((who, found));
                told();
            }
        });
        thread.map(drop).inspect_err(|_| lock(&self.state).threads -= 1)
    }

    /// What was found since.
    pub(super) fn found(&self) -> Vec<(T, Result<Vec<SocketAddr>>)> {
        std::mem::take(&mut lock(&self.state).found)
    }
}

/// What a thread looks up next. Where there is nothing, it ends.
fn next<T>(state: &Mutex<State<T>>) -> Option<(T, Address)> {
    let mut state = lock(state);
    let next = state.asked.pop_front();
    state.threads -= usize::from(next.is_none());
    next
}

fn lock<T>(state: &Mutex<State<T>>) -> MutexGuard<'_, State<T>> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
